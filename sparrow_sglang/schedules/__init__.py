"""Schedules, selection rules and request options; the JSON files are the shipped schedules."""
