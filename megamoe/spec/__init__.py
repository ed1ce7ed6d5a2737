"""From YAML to Spec to Case to the rows that a run owes. Imports the contract alone."""
