"""From YAML to Spec to Case to the rows that a run owes; it imports the contract alone."""
