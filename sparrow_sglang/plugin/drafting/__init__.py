"""Several tokens a step: drafts from earlier text, and their exact verification."""
