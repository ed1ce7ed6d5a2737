"""The implementations that the harness judges and the machines that run them; no backend imports a sibling."""
