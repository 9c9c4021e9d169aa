"""Small programs of the frameworks that we serve: each trains, and notes what its saves take."""
