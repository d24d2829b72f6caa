"""What differs between versions of SGLang: arguments, the installed version, internals."""
