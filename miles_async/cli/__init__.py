"""The `miles-async` command: a table of subcommands, each imported only when it is called."""
