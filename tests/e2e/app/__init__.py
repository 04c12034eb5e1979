"""Applications with handlers: a real broker, real databases, real worker processes."""
