"""Small helpers that know nothing of planning: units, suggestions, files, tables, live buffers.  Standard library alone."""
