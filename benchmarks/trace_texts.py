"""What is read when a routing trace is recorded: conversations of a few paragraphs each.

The subjects lie far apart, as those of a household do, so that a trace has changes of subject.
"""

from __future__ import annotations

from typing import Final

CONVERSATIONS: Final = (
    (
        "The bread did not rise last time, so this evening we start again with the basics. Weigh "
        "five hundred grams of flour, ten grams of salt and three hundred and fifty grams of warm "
        "water. Stir the yeast into the water first and let it stand until small bubbles show. "
        "Then mix everything with a wooden spoon, cover the bowl with a damp cloth and leave it "
        "in a warm corner of the kitchen. The dough is ready to be shaped when",
        "That worked, thank you. The crust was still too soft, though, and the crumb a little "
        "dense near the bottom of the loaf. Our oven has a lower and an upper heating element and "
        "a stone that takes half an hour to get hot. To bake a better loaf next time we should",
    ),
    (
        "def read_config(path):\n    values = {}\n    with open(path) as stream:\n        for line "
        "in stream:\n            if line.startswith('#') or not line.strip():\n                "
        "continue\n            name, _, value = line.partition('=')\n            "
        "values[name.strip()] = value.strip()\n    return values\n\n\ndef write_config(path, "
        "values):\n",
        "\n\nclass ConfigTest(unittest.TestCase):\n    def test_round_trip(self):\n        values "
        "= {'port': '8080', 'host': 'localhost'}\n        write_config('test.cfg', values)\n"
        "        self.assertEqual(read_config('test.cfg'), values)\n\n    def "
        "test_comment_is_ignored(self):\n",
    ),
    (
        "The eastern front of the empire was never quiet for long. In the spring of that year the "
        "general crossed the river with two legions and marched along the old trade road towards "
        "the mountains. Contemporary writers disagree about the number of soldiers, but all of "
        "them mention the long winter that followed, the hunger in the camps and the treaty that "
        "was signed in the end. Historians have argued ever since that the treaty",
        "A second account, found in a monastery library centuries later, tells the story from the "
        "point of view of a merchant who supplied the army with grain and salt. According to him, "
        "the decision to retreat was made long before the first snow, because",
    ),
    (
        "A train leaves the station at 8:15 and travels 120 kilometres at an average speed of 80 "
        "kilometres per hour. A second train leaves the same station at 8:45 and travels the same "
        "way at 120 kilometres per hour. Let t be the time in hours after 8:15. The first train "
        "has covered 80 t kilometres and the second one 120 (t - 0.5) kilometres. The second "
        "train catches up with the first one when",
        "Now suppose that the first train stops for ten minutes after half of the distance, and "
        "that the second one slows down to 90 kilometres per hour in the last third of its way. "
        "Write down the distance as a function of time for both trains, then",
    ),
    (
        "Dear Mrs Miller, thank you for your letter of last week about the flat on the second "
        "floor. The heating was repaired on Tuesday, and the plumber will come again on Friday "
        "morning to look at the tap in the bathroom. Please let us know whether somebody will be "
        "at home between nine and eleven. As for the rent, we would like to propose",
        "The neighbours have also asked about the bicycles in the hallway. The rules of the house "
        "say that the way to the door must be free at all times. There is room in the cellar, "
        "and a second key can be had from",
    ),
    (
        "The cell is the smallest unit of life. Every cell is enclosed by a membrane, which lets "
        "some molecules pass and keeps others out. Inside, the mitochondria turn sugar and oxygen "
        "into energy, while the nucleus holds the DNA with the instructions for all proteins. "
        "When a cell divides, it first copies its DNA. During the next phase",
        "Bacteria do it in another way: they have neither a nucleus nor mitochondria, and their "
        "single ring of DNA is copied while the cell grows. Antibiotics such as penicillin make "
        "use of such differences. They attack",
    ),
)
