"""Load the instruments, and what they measure."""

import impl  # noqa: F401  (registers every implementation)

pytest_plugins = ["shardmark.plugin"]
