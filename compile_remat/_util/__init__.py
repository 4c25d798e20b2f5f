"""Small helpers without any planning: units, suggestions, files, tables, live buffers.  They import the standard library alone."""
