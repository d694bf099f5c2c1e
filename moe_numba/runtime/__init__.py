"""Compiling, launching, tensor maps and argument checks: everything between a public function and its kernel."""
