"""One request in, one answer out; no socket."""
