"""SGLang on a machine without an accelerator, in plain torch."""
