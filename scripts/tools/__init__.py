"""Tools for contributors: goldens, tables of the documents, disassembly, the README's example."""
