"""What a finished run says of itself: report.html and passport.json."""
