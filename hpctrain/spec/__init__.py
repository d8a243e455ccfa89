"""What users write: the documents, their one reader, and what is said about each field."""
