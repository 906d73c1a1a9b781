"""Generate the CustomResourceDefinitions and the field reference from the types."""
