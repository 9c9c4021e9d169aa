"""What every other package needs: ids, errors, layout tables, /proc, small objects."""
