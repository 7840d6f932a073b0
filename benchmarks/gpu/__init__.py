"""What one GPU shows of bapipe: correct schedules, profiles beside whole steps, memory, predicted steps."""
