"""JSON Schemas of the file kinds, generated from the types."""
