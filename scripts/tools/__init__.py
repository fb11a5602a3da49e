"""Tools for contributors: goldens, disassembly, the README's example."""
