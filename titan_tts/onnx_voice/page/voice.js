// voice.py in JavaScript, for one piece of English text: speaks by the files of `titan-tts export --onnx`.
import * as ort from "onnxruntime-web"
import { phonemize } from "phonemizer"

const ALIKE = { x: "k", ɬ: "l", ç: "h", ɲ: "n", ʲ: "" }
const CONTEXTS = [[], [0], [0, 1], [-1, 0, 1], [-1, 0, 1, 2], [-2, -1, 0, 1, 2]] // as in text/aligner.py
const MARKS = /((?:\s*(?:[;:!?¡¿—…"«»“”(){}[\]]|(?<!\d)[.,]|[.,](?!\d))+\s*)+)/ // as phonemizer of Python

const mixed = (a, p, b, q) => a.map((v, i) => p * v + q * b[i])
const tensor = (values, shape) => new ort.Tensor("float32", Float32Array.from(values), shape)
const normal = size => Float32Array.from({ length: size }, () =>
  Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random()))

/** The voice of a folder, by its address. Texts and voices that it does not know are errors. */
export async function open(folder) {
  const fetched = async name => {
    const found = await fetch(new URL(name, folder))
    if (!found.ok && name != "aligner.npz") throw Error(`${name}: ${found.status} ${found.statusText}`)
    return found.ok && found.arrayBuffer()
  }
  const settings = JSON.parse(new TextDecoder().decode(await fetched("voice.json")))
  const { reader, channels, patch, hop, max_reference, max_tokens, max_caption, noise_scale } = settings
  if (settings.format != "titan-tts-onnx 1" || !/^en/.test(reader.language) || reader.in_bytes)
    throw Error(`${folder} is no export of a model that reads the phones of English`)
  const voices = arrays(await fetched("voices.npz")), aligner = arrays(await fetched("aligner.npz"))
  const lengths = new Map(aligner && [...aligner.length_keys].map((key, n) => [key, aligner.length_values[n]]))
  const graphs = {}
  for (const name of ["encoder", "step", "length", "sound"])
    graphs[name] = await ort.InferenceSession.create(new Uint8Array(await fetched(`${name}.onnx`)))

  async function run(name, given) {
    const { inputNames, outputNames } = graphs[name]
    const found = await graphs[name].run(Object.fromEntries(inputNames.map(each => [each, given[each]])))
    return outputNames.map(each => found[each])
  }

  /** Marks and rare phones that the voice does not know as others, as by text/conventions.py. */
  function knownMarks(spoken) {
    const like = (mark, other) => (mark in reader.ids ? mark : other in reader.ids ? other : "")
    const found = spoken.replace(/[;:—–)\]}]/g, mark => like(mark, ",")).replace(/…/g, mark => like(mark, "."))
      .replace(/[([{"“”„«»¡¿]/g, mark => like(mark, "")).replace(/[xɬçɲʲ]/g, phone => like(phone, ALIKE[phone]))
    return found == spoken ? spoken : found.replace(/[\s,]+(?=[.,!?])/g, "").replace(/\s+/g, " ").trim() || spoken
  }

  /** Phones by espeak-ng, with the text's punctuation. */
  async function phones(text) {
    const parts = text.normalize("NFC").trim().replace(/\s+/g, " ").split(MARKS)
    for (let n = 0; n < parts.length; n += 2) // between marks; flags of other languages go
      if (parts[n]) parts[n] = (await phonemize(parts[n], reader.language)).join(" ").replace(/\(.*?\)|_/g, "").trim()
    // Before r today's espeak-ng says ɔː where that of phonemizer.js says oː.
    return parts.join("").replaceAll("oː", "ɔː").trim()
  }

  /** Where in the speech each phone is expected, as by text/aligner.py. */
  function positions(spoken) {
    const states = [0, ...spoken.map(c => [...aligner.symbols].indexOf(c.toLowerCase()) + 2), 0]
    let end = 0
    const ends = states.map((_, i) => {
      const key = (context, n) => context.reduce(
        (key, distance) => BigInt.asUintN(64, key * 1114127n + BigInt(states[i + distance] ?? 0)), BigInt(n + 1))
      const frames = CONTEXTS.reduce((sum, context, n) => sum + (lengths.get(key(context, n)) ?? 0), 0)
      return (end += Math.max(0.05, frames))
    })
    return spoken.map((_, i) => (ends[i] + ends[i + 1]) / 2 / end)
  }

  /** What encoder and length predictor see of a text, a voice and a caption. */
  async function conditions(text, voice, caption) {
    const spoken = [...knownMarks(await phones(text))], unknown = spoken.filter(c => !(c in reader.ids))
    if (unknown.length) throw Error(`the voice was not trained with the characters ${unknown.join(" ")}; leave them out`)
    const ids = [reader.ends[0], ...spoken.map(c => reader.ids[c]), reader.ends[1]]
    const numbers = ids => new ort.Tensor("int64", ids.map(BigInt), [1, ids.length])
    const latents = voice ? voices[voice]?.slice(0, max_reference * channels) : []
    if (!latents) throw Error(`there is no voice ${voice}; the folder has: ${Object.keys(voices).join(", ")}`)
    if (ids.length > max_tokens) throw Error(`the text has ${ids.length} phones, but at most ${max_tokens} are allowed; shorten it`)
    const words = new TextEncoder().encode(caption.normalize("NFC").trim())
    if (caption && !max_caption) throw Error("the voice takes no captions")
    if (words.length > max_caption) throw Error(`the caption has ${words.length} bytes, but at most ${max_caption} are allowed`)
    const patches = Math.max(1, Math.ceil(latents.length / patch / channels))
    const reference = new Float32Array(patches * patch * channels)
    reference.set(latents)
    return {
      ids: numbers(ids),
      caption: numbers(words.length ? [...words] : [0]),
      positions: tensor(aligner ? [-1, ...positions(spoken), -1] : ids.map(() => -1), [1, ids.length]),
      reference: tensor(reference, [1, patches, patch * channels]),
      has_speaker: new ort.Tensor("bool", [!!voice], [1]),
      has_caption: new ort.Tensor("bool", [words.length > 0], [1]),
    }
  }

  /** Latent frames that a text takes. */
  async function frames(text, voice, caption = "") {
    const [found] = await run("length", await conditions(text, voice, caption))
    return Math.max(1, Math.round(Math.exp(found.data[0])))
  }

  /** (frames * channels) of a text, of noise of the same size. */
  async function latents(text, voice, noise, caption = "") {
    const length = noise.length / channels
    const given = { ...(await conditions(text, voice, caption)), frames: tensor([length], [1]) }
    const kept = (keys, has) => keys.map((key, n) => (has[n] ? key : tensor([], key.dims.with(3, 0))))
    const [has_caption] = given.has_caption.data, keys = kept(await run("encoder", given), [true, voice, has_caption])
    async function velocity(x, t, branches) {
      const found = [], given = { latents: tensor(x, [1, length, channels]), t: tensor([t], [1]) }
      for (const [, ...has] of [[0, true, true, true], ...branches]) {
        const [text, speaker, caption_keys] = kept(keys, has)
        found.push((await run("step", { ...given, text, speaker, caption_keys }))[0].data)
      }
      const [first, ...others] = found
      return first.map((v, i) => branches.reduce((sum, [scale], n) => sum + scale * (v - others[n][i]), v))
    }
    let x = noise.map(v => v * noise_scale)
    for (const [[begin, ...inner], width, branches] of settings[has_caption ? "caption_steps" : "steps"]) {
      let slope = await velocity(x, begin, branches)
      for (const t of inner) {
        const weight = width / (2 * (t - begin))
        const second = await velocity(mixed(x, 1, slope, t - begin), t, branches)
        slope = mixed(slope, 1 - weight, second, weight)
      }
      x = mixed(x, 1, slope, width)
    }
    return x
  }

  /** Samples in [-1, 1], `settings.sample_rate` per second. `voice`: one of `voices`, or "" for no particular one; without a
   *  caption the default one. */
  async function speak(text, voice, caption = "") {
    voice ??= caption.trim() ? "" : settings.voice
    if ("." in reader.ids) text = text.replace(/([\p{L}\p{N}][^\p{L}\p{N}.!?…,;:]*)$/u, "$1.") // as speak/long_text.py
    const length = await frames(text, voice, caption)
    const said = await latents(text, voice, normal(length * channels), caption)
    const given = { latents: tensor(said, [1, length, channels]), noise: tensor(normal(length * hop), [1, length, hop]) }
    return (await run("sound", given))[0].data.map(v => Math.min(1, Math.max(-1, v)))
  }

  return { settings, voices, phones, frames, latents, speak }
}

/** Arrays by name of a file of np.savez: a zip without compression. */
function arrays(buffer) {
  if (!buffer) return
  const view = new DataView(buffer), short = at => view.getUint16(at, true), found = {}
  const text = (at, size) => new TextDecoder("latin1").decode(new Uint8Array(buffer, at, size))
  for (let at = 0; text(at, 4) == "PK\x03\x04"; ) {
    const name = text(at + 30, short(at + 26)), npy = at + 30 + short(at + 26) + short(at + 28), begin = npy + 10 + short(npy + 8)
    const [, kind, each, shape] = text(npy + 10, short(npy + 8)).match(/'descr': '<(\w)(\d+)'.*'shape': \((.*?)\)/)
    at = begin + shape.split(",").filter(n => n.trim()).reduce((a, n) => a * n, kind == "U" ? 4 * each : +each)
    const values = new { f: Float32Array, u: BigUint64Array, U: Uint32Array }[kind](buffer.slice(begin, at))
    found[name.replace(/\.npy$/, "")] = kind == "U" ? String.fromCodePoint(...values) : values
  }
  return found
}
