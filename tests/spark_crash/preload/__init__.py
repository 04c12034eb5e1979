"""A directory on the path of Spark's Python processes; see `sitecustomize`."""
