"""The command `sparrow`, one file per subcommand: parse, call, print."""
