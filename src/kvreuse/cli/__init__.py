"""The command line. Each subcommand is a module that is imported only when it runs."""
