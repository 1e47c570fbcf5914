"""The CloudFormation stacks of an instance: one file each; a stack wires, constructs define."""
