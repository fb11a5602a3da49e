"""Tools for those who change the code: goldens, disassembly, the README's example."""
