import training  # noqa: F401  (registers the team's implementations)
