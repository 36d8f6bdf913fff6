"""Object classes and colors of the bundled model, with their names in English, Spanish and Chinese."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Noun:
    """The names of a class. `name`, the English singular, identifies the class everywhere."""

    name: str
    plural: str
    spanish: str
    spanish_plural: str
    gender: str  # "m" or "f"
    chinese: str
    measure_word: str  # Chinese: 一只狗


@dataclass(frozen=True)
class ObjectClass:
    """A class of objects.

    Attributes:
        icons: names of its icons, the default one first; a style may lack some of them.
        fxemoji_icons: the same for `fxemoji`, which has its own naming scheme.
        recolor: pixels that are repainted to give the object a named color: "main" for those close to the icon's
            dominant hue (a car's body, but not its windows), "all" for all saturated pixels, None for a class without
            named colors. Only classes that are recognizable in any color, in every style, are recolored.
    """

    noun: Noun
    icons: tuple[str, ...]
    fxemoji_icons: tuple[str, ...] = ()
    recolor: str | None = None

    @property
    def name(self) -> str:
        """The English singular."""
        return self.noun.name


@dataclass(frozen=True)
class Color:
    """A named color.

    Attributes:
        rgb: red, green and blue, 0 to 255, of the median shade of a recolored icon.
        spanish: masculine, feminine, masculine plural and feminine plural.
    """

    rgb: tuple[int, int, int]
    spanish: tuple[str, str, str, str]
    chinese: str


COLORS = {
    "red": Color((214, 38, 38), ("rojo", "roja", "rojos", "rojas"), "红色"),
    "orange": Color((245, 132, 22), ("naranja",) * 4, "橙色"),
    "yellow": Color((252, 214, 46), ("amarillo", "amarilla", "amarillos", "amarillas"), "黄色"),
    "green": Color((62, 164, 68), ("verde", "verde", "verdes", "verdes"), "绿色"),
    "blue": Color((44, 108, 214), ("azul", "azul", "azules", "azules"), "蓝色"),
    "purple": Color((134, 64, 186), ("morado", "morada", "morados", "moradas"), "紫色"),
    "pink": Color((246, 134, 186), ("rosa",) * 4, "粉色"),
}


def _object_class(names: str, icons: str, fxemoji_icons: str = "", recolor: str | None = None) -> ObjectClass:
    return ObjectClass(Noun(*names.split()), tuple(icons.split()), tuple(fxemoji_icons.split()), recolor)


CLASSES = {
    object_class.name: object_class
    for object_class in (
        _object_class("dog dogs perro perros m 狗 只", "dog-face dog poodle service-dog", "dog dogside poodle"),
        _object_class("cat cats gato gatos m 猫 只", "cat-face cat grinning-cat pouting-cat black-cat", "cat catside"),
        _object_class("rabbit rabbits conejo conejos m 兔子 只", "rabbit-face rabbit", "bunny bunnyside"),
        _object_class("bear bears oso osos m 熊 只", "bear polar-bear", "bear"),
        _object_class("panda pandas panda pandas m 熊猫 只", "panda", "pandaface"),
        _object_class("lion lions león leones m 狮子 只", "lion"),
        _object_class("pig pigs cerdo cerdos m 猪 头", "pig-face pig", "pig pigside"),
        _object_class("cow cows vaca vacas f 牛 头", "cow-face cow", "cowface cow"),
        _object_class("frog frogs rana ranas f 青蛙 只", "frog", "frog"),
        _object_class("fox foxes zorro zorros m 狐狸 只", "fox", "foxsmiling foxgrin foxpouting"),
        _object_class("penguin penguins pingüino pingüinos m 企鹅 只", "penguin", "penguin"),
        _object_class("owl owls búho búhos m 猫头鹰 只", "owl"),
        _object_class("elephant elephants elefante elefantes m 大象 头", "elephant", "elephant"),
        _object_class("turtle turtles tortuga tortugas f 乌龟 只", "turtle", "turtle"),
        _object_class("fish fish pez peces m 鱼 条", "fish tropical-fish", "fish tropicalfish", "all"),
        _object_class("bee bees abeja abejas f 蜜蜂 只", "honeybee", "honeybee"),
        _object_class("butterfly butterflies mariposa mariposas f 蝴蝶 只", "butterfly", recolor="all"),
        _object_class("octopus octopuses pulpo pulpos m 章鱼 只", "octopus", "octopus", "main"),
        _object_class("apple apples manzana manzanas f 苹果 个", "red-apple green-apple", "redapple greenapple"),
        _object_class("banana bananas plátano plátanos m 香蕉 根", "banana", "banana"),
        _object_class("lemon lemons limón limones m 柠檬 个", "lemon", "lemon"),
        _object_class("strawberry strawberries fresa fresas f 草莓 颗", "strawberry", "strawberry"),
        _object_class("watermelon watermelons sandía sandías f 西瓜 块", "watermelon", "watermelon"),
        _object_class("pizza pizzas pizza pizzas f 披萨 块", "pizza", "sliceofpizza"),
        _object_class("burger burgers hamburguesa hamburguesas f 汉堡 个", "hamburger", "hamburger"),
        _object_class("donut donuts rosquilla rosquillas f 甜甜圈 个", "doughnut", "doughnut"),
        _object_class("cake cakes pastel pasteles m 蛋糕 块", "shortcake birthday-cake", "shortcake birthdaycake"),
        _object_class("mushroom mushrooms seta setas f 蘑菇 个", "mushroom brown-mushroom", "mushroom"),
        _object_class(
            "car cars coche coches m 汽车 辆",
            "automobile oncoming-automobile sport-utility-vehicle",
            "automobile oncomingautomobile",
            "main",
        ),
        _object_class("bus buses autobús autobuses m 公交车 辆", "bus oncoming-bus", "bus trolleybus"),
        _object_class("plane planes avión aviones m 飞机 架", "airplane small-airplane", "airplane"),
        _object_class("boat boats barco barcos m 船 艘", "sailboat motor-boat", "sailboat speedboat"),
        _object_class("rocket rockets cohete cohetes m 火箭 枚", "rocket", "rocket"),
        _object_class("bicycle bicycles bicicleta bicicletas f 自行车 辆", "bicycle", "bicycle"),
        _object_class("ball balls pelota pelotas f 足球 个", "soccer-ball", "soccerball"),
        _object_class("guitar guitars guitarra guitarras f 吉他 把", "guitar", "guitar", "all"),
        _object_class("balloon balloons globo globos m 气球 个", "balloon", "balloon", "main"),
        _object_class("house houses casa casas f 房子 座", "house", "housebuilding"),
        _object_class("tree trees árbol árboles m 树 棵", "deciduous-tree evergreen-tree", "deciduoustree evergreen"),
        _object_class("sunflower sunflowers girasol girasoles m 向日葵 朵", "sunflower", "sunflower"),
    )
}
