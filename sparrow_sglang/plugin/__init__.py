"""Everything that runs inside SGLang's processes: registration, hooks, refusals, control."""
