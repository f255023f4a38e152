"""Much text into tokens: in pieces, by several processes, into tables that are mapped."""
