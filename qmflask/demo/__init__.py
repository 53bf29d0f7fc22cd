"""The built-in demonstration model server: two or three of them show a swap without a GPU and without a download."""
