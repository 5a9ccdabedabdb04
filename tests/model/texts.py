"""Texts of several kinds for measurements of quality, written for this purpose: about 200 tokens each."""

PROSE = (
    "The river rose in the night. By morning the lower street was under 2 feet of water, and the baker carried his "
    'flour upstairs in sacks. "It has been worse," he said, "in 1953." Nobody believed him, but everybody helped. '
    "When the sun came out again, they put tables in the road and ate together. The school stayed closed for nine "
    "days. Children found fish in the cellar of the town hall and kept them in a bath until the mayor asked for it "
    "back. In the evening an old ferryman took people across the square in his boat, slowly, without a word, and "
    "would not take money. Years later, when the wall along the bank was finished and the water could not come any "
    "more, some of them said that they missed the tables, the bread, and the quiet of the street at night. The "
    "baker moved his oven up one floor all the same, and painted a blue line on the door where the water had been."
)

NUMBERS = (
    "Shopping list for the week: 12 eggs, 2 litres of milk, 500 g of flour, salt, pepper, 3 onions, a bag of rice, "
    "olive oil, 6 apples, 4 lemons, tea, coffee, and one bar of dark chocolate.\n"
    "| item | pieces | price | sum |\n|---|---|---|---|\n| eggs | 12 | 0.35 | 4.20 |\n| milk | 2 | 1.15 | 2.30 |\n"
    "| flour | 1 | 0.89 | 0.89 |\n| onions | 3 | 0.40 | 1.20 |\n| apples | 6 | 0.55 | 3.30 |\n"
    "| lemons | 4 | 0.60 | 2.40 |\nTotal: 14.29\n1. Monday: 7 km, 42 minutes\n2. Tuesday: rest\n"
    "3. Wednesday: 9 km, 55 minutes\n"
)

CODE = '''def merge(left, right):
    """Merge two sorted lists into one."""
    result = []
    while left and right:
        if left[0] <= right[0]:
            result.append(left.pop(0))
        else:
            result.append(right.pop(0))
    return result + left + right


class Counter:
    def __init__(self, limit: int = 10) -> None:
        self.limit = limit
        self.counts: dict[str, int] = {}

    def add(self, word: str) -> bool:
        if self.counts.get(word, 0) >= self.limit:
            return False
        self.counts[word] = self.counts.get(word, 0) + 1
        return True


if __name__ == "__main__":
    counter = Counter(limit=2)
    for word in "the cat and the dog and the bird".split():
        print(word, counter.add(word))
    print(merge([1, 4, 7], [2, 3, 9]))
'''

DIALOGUE = (
    "- Where were you last night?\n- At home. I read a book about the moon.\n- All night?\n- Until two. Then I could "
    "not sleep, so I counted the ticks of the clock in the kitchen, and after a while I forgot the number, and the "
    "clock.\n- And in the morning?\n- I made coffee and began the book again. Do you know that it moves away from "
    "us? A little every year, less than the width of a hand.\n- Does that worry you?\n- No. But I think that someone "
    "should write it down.\n- Someone has. It is in your book.\n- Yes, and now it is also in your head. That makes "
    "two of us. Would you like some coffee? It is still warm.\n- With milk, please. And then tell me how far it is.\n"
    "- Three hundred and eighty thousand kilometres. On foot, nine years, if you never stop to eat.\n"
)

FRENCH = (
    "Il était une fois une petite maison au bord de la mer. Chaque matin, une vieille femme ouvrait la fenêtre et "
    "regardait les bateaux. Elle attendait son fils, parti depuis dix ans vers les îles lointaines. Un jour, un "
    "marin frappa à la porte et lui donna une lettre sans timbre. Elle la posa sur la table, prépara du thé, et ne "
    "l'ouvrit que le soir, quand la lumière était douce. La lettre disait seulement : « Je reviens au printemps. »"
)

TEXTS = {"prose": PROSE, "numbers": NUMBERS, "code": CODE, "dialogue": DIALOGUE, "french": FRENCH}
