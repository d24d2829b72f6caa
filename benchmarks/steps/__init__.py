"""One decode step of SGLang, dense and sparse."""
