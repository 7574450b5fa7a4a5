// The search runs in a worker, which browsers refuse to pages of a folder; there a hidden frame takes its place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      const load = (address) => new Promise((resolve, reject) => {
        const script = inside.document.createElement("script")
        Object.assign(script, { src: address, onload: resolve, onerror: reject })
        inside.document.body.append(script)
      })
      inside.importScripts = (...addresses) => addresses.reduce((done, a) => done.then(() => load(a)), Promise.resolve())
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      this.ready = load(url)
    }
    postMessage(data) {
      const inside = this.frame.contentWindow
      this.ready.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }
    terminate() { this.frame.remove() }
  }
}
