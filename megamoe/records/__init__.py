"""Lines of record files: their form, keys and severity, their provenance, and how they are written; no policy."""
