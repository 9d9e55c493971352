"""Check the machine, and find a transport by which its ranks can communicate."""
