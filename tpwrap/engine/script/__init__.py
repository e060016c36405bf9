"""The script as it is: what makes a training healable that knows nothing of us."""
