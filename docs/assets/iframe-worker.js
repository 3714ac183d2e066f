// Search runs in a worker, which browsers do not start from the file system. There, the same script
// runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = frame.contentDocument.createElement("script")
      this.loaded = new Promise(resolve => { script.onload = resolve })
      script.src = url
      frame.contentDocument.body.append(script)
    }

    async postMessage(data) {
      await this.loaded
      this.inside.dispatchEvent(new MessageEvent("message", { data }))
    }
  }
}
