"""A directory for the path of Spark's Python processes; see `sitecustomize`."""
