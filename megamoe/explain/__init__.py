"""What a kernel does, as pictures and tables, from its recorded run."""
