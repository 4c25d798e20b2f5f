"""Small helpers of no domain: units in text, suggestions, files, tables.  Imports the standard library alone."""
