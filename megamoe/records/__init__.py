"""Lines of record files: their form, keys and severity, where they come from, and how they are written; no policy."""
