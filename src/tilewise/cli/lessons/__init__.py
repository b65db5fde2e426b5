"""`tilewise check` and `tilewise lab`: exercises and labs of the lessons."""
