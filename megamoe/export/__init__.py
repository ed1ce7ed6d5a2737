"""Records in foreign formats: flashinfer-bench, JUnit; knows those formats and lines, no policy."""
