"""HTTP: parse, call the service, answer. Flask and Werkzeug are at home here and nowhere else."""
