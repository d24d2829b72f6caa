"""Calls to a running engine or a server's URL: scores, acceptance rates, schedules, adapters."""
