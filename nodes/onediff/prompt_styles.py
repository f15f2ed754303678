"""Styles of prompts. Their names are those that OneDiff's workflows contain; their words are this extension's own."""

from __future__ import annotations

from typing import NamedTuple


class Style(NamedTuple):
    """Words around a prompt, and words for what is unwanted."""

    template: str
    unwanted: str

    def positive(self, prompt: str) -> str:
        """Return the prompt in this style."""
        return self.template.replace("{prompt}", prompt)

    def negative(self, prompt: str) -> str:
        """Return the negative prompt with what this style does not want before it."""
        return ", ".join(part for part in (self.unwanted, prompt) if part)


_PHOTO = "photo, realistic skin, camera noise"
_DRAWN = "drawing, painting, cartoon, 3d render"
_MODERN = "modern objects, plain background"
_FLAT = "flat colours, sketch, low detail"
_COLOUR = "bright colours, colour photo"
_DEPTH = "depth of field, heavy shading, photo"
_DULL = "dull colours, blur, low contrast"

_WORDS = {
    "(No style)": ("{prompt}", ""),
    "Watercolor": ("{prompt} in watercolour, soft washes of paint on rough paper, bleeding edges", _PHOTO),
    "Film Noir": ("{prompt} in a 1940s crime film, black and white, one hard lamp, long shadows, smoke", _COLOUR),
    "Neon": ("{prompt} at night among glowing neon tubes, pink and blue light, wet street", "daylight, " + _DULL),
    "Jungle": ("{prompt} deep in a rain forest, huge leaves, shafts of sun, mist", "city, snow, desert"),
    "Mars": ("{prompt} on the red planet, rust-coloured dust, rocks, pale sky, a distant base", "trees, grass, sea"),
    "Vibrant Color": ("{prompt} in bold saturated colours, strong outlines, lively shapes", "grey, " + _DULL),
    "Snow": ("{prompt} in a winter landscape, falling snow, frost, cold light", "summer, rain, sand"),
    "Line art": ("{prompt} as clean black lines on white, even strokes, no shading", "colour, texture, " + _PHOTO),
    "3D Model": ("{prompt} as a detailed 3d model, studio light, smooth materials", _FLAT),
    "Analog Film": ("{prompt} on analog film, visible grain, slightly faded colours, light leak", _DRAWN),
    "Anime": ("{prompt} as a frame of an anime, clear outlines, cel shading, expressive", _PHOTO),
    "Cinematic": ("{prompt} as a frame of a feature film, wide lens, shallow focus, graded colours", _DRAWN),
    "Comic Book": ("{prompt} as a panel of a comic, ink outlines, halftone dots, strong poses", _PHOTO),
    "Craft Clay": ("{prompt} modelled in clay, finger prints, rounded shapes, small set", "metal, glass, " + _FLAT),
    "Digital Art": ("{prompt} as a digital painting, careful light, rich detail, matte finish", _PHOTO),
    "Enhance": ("{prompt}, fine detail, balanced light, sharp focus, pleasing composition", _DULL),
    "Fantasy Art": ("{prompt} in a world of magic, glowing light, old ruins, epic scale", _MODERN),
    "Isometric Style": ("{prompt} from above at an isometric angle, small scene, tidy edges", "perspective, horizon"),
    "Line Art": ("{prompt} as an ink drawing of few lines, white paper", "colour, shading, " + _PHOTO),
    "Lowpoly": ("{prompt} built of few large polygons, faceted surfaces, simple light", "noise, fine texture"),
    "Neon Punk": ("{prompt} in a neon-lit future city, chrome, purple haze, hard contrast", "daylight, rural"),
    "Origami": ("{prompt} folded of one sheet of paper, sharp creases, plain backdrop", "liquid, fur, " + _FLAT),
    "Photographic": ("a photo of {prompt}, natural light, 50mm lens, true colours", _DRAWN),
    "Pixel Art": ("{prompt} as pixel art, few colours, large square pixels", "smooth gradients, " + _PHOTO),
    "Texture": ("a seamless texture of {prompt}, seen straight from above, even light", "objects, horizon, shadow"),
    "Advertising": ("{prompt} in an advertisement, spotless studio, the product in the centre", "clutter, dirt"),
    "Food Photography": ("{prompt} on a set table, close, steam, appetising, soft window light", "people, plastic"),
    "Real Estate": ("{prompt} for a house listing, wide angle, bright rooms, straight walls", "people, dark, clutter"),
    "Abstract": ("{prompt} dissolved into abstract shapes, colour and rhythm before likeness", "realistic, photo"),
    "Cubist": ("{prompt} in the manner of the cubists, broken planes, several views at once", "realistic, smooth"),
    "Graffiti": ("{prompt} sprayed on a wall, thick outlines, drips, bold letters around it", "frame, gallery"),
    "Hyperrealism": ("{prompt} painted so exactly that it looks real, every pore and reflection", "abstract, blur"),
    "Impressionist": ("{prompt} in short visible brush strokes, open air, changing light", "hard edges, " + _PHOTO),
    "Pointillism": ("{prompt} made of thousands of small dots of pure colour", "lines, flat areas, " + _PHOTO),
    "Pop Art": ("{prompt} as pop art, primary colours, screen print, repeated motif", "muted colours, " + _PHOTO),
    "Psychedelic": ("{prompt} in swirling rainbow patterns, melting shapes, 1960s poster", "grey, " + _DULL),
    "Renaissance": ("{prompt} as an oil painting of the Renaissance, calm faces, glazed colours", _MODERN),
    "Steampunk": ("{prompt} with brass gears, rivets, steam and leather, Victorian machines", "plastic, digital"),
    "Surrealist": ("{prompt} in an impossible dream scene, odd scale, long shadows", "ordinary, plain"),
    "Typography": ("{prompt} arranged as large letters, careful spacing, poster layout", "photo, clutter"),
    "Fighting Game": ("{prompt} as a fighter on an arena stage, action pose, sparks", "calm, still life"),
    "GTA": ("{prompt} as the cover of a crime game in a sunny city, bold shading, cut panels", "medieval, pastel"),
    "Super Mario": ("{prompt} in a cheerful jump and run world, round hills, bright blocks", "dark, gritty"),
    "Minecraft": ("{prompt} in a world of cubes, coarse square textures", "curves, smooth surfaces"),
    "Pokémon": ("{prompt} as a small cute creature of a monster-collecting game, big eyes, clean lines", "scary, gore"),
    "Retro Arcade": ("{prompt} on the screen of an 1980s arcade machine, few pixels, scan lines", "smooth, modern"),
    "Retro Game": ("{prompt} in a 16-bit console game, sprites, limited palette", "3d, smooth, photo"),
    "RPG Fantasy Game": ("{prompt} in a role-playing game, ornate armour, spell light, tavern or keep", _MODERN),
    "Strategy Game": ("{prompt} on the map of a strategy game, seen from above, many small units", "close portrait"),
    "Street Fighter": ("{prompt} as a martial artist of a 1990s arcade fighter, muscular, motion lines", "calm"),
    "Legend of Zelda": ("{prompt} in a bright adventure world, green fields, ancient shrine, cel shading", _MODERN),
    "Architectural": ("{prompt} as an architect's rendering, clear geometry, glass and concrete", "people, clutter"),
    "Disco": ("{prompt} on a 1970s dance floor, mirror ball, coloured spots, glitter", "daylight, " + _DULL),
    "Dreamscape": ("{prompt} in a soft dream, floating things, pastel clouds, haze", "harsh light, gritty"),
    "Dystopian": ("{prompt} in a ruined future, grey sky, concrete, watchful cameras", "cheerful, sunny"),
    "Fairy Tale": ("{prompt} in a story book, enchanted wood, warm lanterns, gentle magic", _MODERN),
    "Gothic": ("{prompt} among pointed arches and candles, dark velvet, gloom", "cheerful, bright colours"),
    "Grunge": ("{prompt} with scratches, torn paper and dirt, rough 1990s look", "clean, polished"),
    "Horror": ("{prompt} in a nightmare, darkness, one weak light, unease", "cheerful, bright, cute"),
    "Minimalist": ("{prompt} with few shapes, much empty space, two or three colours", "clutter, ornament"),
    "Monochrome": ("{prompt} in shades of one colour, strong tones", _COLOUR),
    "Nautical": ("{prompt} by the sea, ships, rope, salt spray, navy blue and white", "desert, forest, city"),
    "Space": ("{prompt} in outer space, stars, nebula, planets", "trees, houses, daylight"),
    "Stained Glass": ("{prompt} as a church window, pieces of coloured glass, lead lines, light from behind", _PHOTO),
    "Techwear Fashion": ("{prompt} in technical clothes, straps, pockets, matte black, city at dusk", "old, rustic"),
    "Tribal": ("{prompt} with carved wood, woven patterns, earth colours, ritual paint", _MODERN),
    "Zentangle": ("{prompt} filled with dense pen patterns, black on white", "colour, " + _PHOTO),
    "Collage": ("{prompt} as a collage of torn magazines and paper, overlapping pieces", "seamless, photo"),
    "Flat Papercut": ("{prompt} cut of one sheet of paper, clear silhouette, two colours", _DEPTH),
    "Kirigami": ("{prompt} as cut and folded paper that stands up, white, soft shadow", "paint, glossy, photo"),
    "Paper Mache": ("{prompt} of papier-mâché, rough layers, hand-painted", "glossy, photo, fine detail"),
    "Paper Quilling": ("{prompt} of rolled strips of paper, spirals, bright colours", "flat, photo"),
    "Papercut Collage": ("{prompt} of many cut papers in mixed patterns, layered", _DEPTH),
    "Papercut Shadow Box": ("{prompt} as layers of cut paper in a box, lit from behind", "flat, painted"),
    "Stacked Papercut": ("{prompt} as stacked sheets of cut paper, one colour for each height", "painted, photo"),
    "Thick Layered Papercut": ("{prompt} of thick cut card in deep layers, strong shadows", "thin lines, photo"),
    "Alien": ("{prompt} from another planet, strange anatomy, unknown plants, eerie light", "earthly, ordinary"),
    "HDR": ("a photo of {prompt} with detail in light and shadow alike, many exposures", "blown highlights, " + _DULL),
    "Long Exposure": ("a long exposure of {prompt}, trails of light, smooth water, still ground", "frozen motion"),
    "Neon Noir": ("{prompt} in a rainy night city, neon signs, deep shadows, lone figure mood", "daylight, cheerful"),
    "Silhouette": ("{prompt} as a dark outline against a bright sky", "detail in the subject, colour"),
    "Tilt-Shift": ("a photo of {prompt} that looks like a miniature, narrow band of focus, from above", "all in focus"),
}

STYLES = {name: Style(*words) for name, words in _WORDS.items()}
