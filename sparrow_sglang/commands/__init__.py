"""The command `sparrow`, one file a verb: parse, call, print."""
