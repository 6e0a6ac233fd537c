"""Rows beside those of an older run (`--against`) or of another commit (`--against-ref`)."""
