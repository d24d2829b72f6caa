"""Everything that runs inside SGLang's processes, one folder for each of them."""
