"""Names that several domains of the toy's texts use."""

PEOPLE = ("Mia", "Ben", "Ada", "Tom", "Lea", "Sam", "Eva", "Max", "Ida", "Jon", "Kim", "Leo")
