"""Lines, their keys, their files and where they come from. Knows lines, no policy."""
